"""llm-foundry: MPT and Hugging Face's models under Composer's trainer."""
