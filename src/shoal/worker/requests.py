"""What a worker can request of all workers with a step: bits of one number that travels with the step's stats."""

STOP = 1  # end the run after this step
SAVE = 2  # write a checkpoint after this step
CHANGE = 4  # let waiting workers in after this step
LEAVE = 8  # this worker leaves after this step
EVICT = 16  # with LEAVE: because it is too slow
SNAPSHOT = 32  # parameter servers write this step to disk
END = 64  # end the run after this step, for good: a callback on the leader decided it
