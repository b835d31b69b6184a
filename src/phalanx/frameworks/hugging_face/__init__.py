"""TrainingArguments of transformers' Trainer, with the DeepSpeed file that they name."""
