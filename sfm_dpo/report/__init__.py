"""What a run leaves for its readers: report page, figures, model card; and why two runs differ."""
