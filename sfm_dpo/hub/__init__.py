"""The Hugging Face Hub: models are checked, described and uploaded."""
