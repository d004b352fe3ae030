"""Where a run's numbers go beside its folder: TensorBoard, a CSV file, Weights & Biases, MLflow, the user's own."""
