"""What a run records and shows: events, the live view, the closing report. Starts nothing."""
