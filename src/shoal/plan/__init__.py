"""The placement of a job, and the laws that say what more workers are worth. Pure."""
