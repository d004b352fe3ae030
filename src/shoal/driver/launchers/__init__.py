"""Where the processes of a run come from: `base.Launcher` is the contract, `local` and `lab` implement it."""
