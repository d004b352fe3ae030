"""Faults on purpose: a schedule of them, played against a real run, and what the run made of them.

schedule.py    when, what and whom: a pure function of a seed
player.py      starts the run, does what the schedule says, writes down what it did
scorecard.py   what it came to, against a twin without faults: a pure function of what both left behind
"""
