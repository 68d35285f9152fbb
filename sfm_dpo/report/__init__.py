"""What a run leaves for people: report page, figures, model card."""
