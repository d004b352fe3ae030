"""How a job is cut: samples into steps, a batch into lanes, lanes among workers, a model into blocks. All pure."""
