"""How a step is spread over workers: layout, plan, schedules, and one file for each strategy."""
