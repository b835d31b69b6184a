"""Answers a question when it is imported, so that a forked call need not read the files that every question needs."""

from phalanx.answers.prediction import predict

predict(model="gpt2", cluster="dgx-h100", gpus=8, batch=8, seq=1024, strategy="dp=8")
