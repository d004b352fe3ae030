"""What a run tells: events, the live view, the closing report. Reads messages and files; starts nothing."""
