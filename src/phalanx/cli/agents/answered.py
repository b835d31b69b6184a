"""Answers a question while it is imported: what every question reads has then been read before a call is forked."""

from phalanx.answers.prediction import predict

predict(model="gpt2", cluster="dgx-h100", gpus=8, batch=8, seq=1024, strategy="dp=8")
