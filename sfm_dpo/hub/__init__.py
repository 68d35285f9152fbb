"""The Hugging Face Hub: what is published, verified, uploaded."""
