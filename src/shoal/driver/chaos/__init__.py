"""`shoal chaos`: injects faults into a real run and compares it with a twin without faults.

schedule.py    when, which kind and on which worker: a pure function of a seed
player.py      starts the run, injects the faults, records them
scorecard.py   compares the run with the twin: a pure function of the files of both
"""
