"""Answers what a run would cost before it starts: cluster descriptions, step costs, plan search, simulation."""
