"""What attention's forward pass leaves for its backward pass, by name, for `jax.checkpoint` policies."""

# Outputs and log-sum-exps: kept, a rematerialised layer attends once less.
ATTENTION = 'attention_output'
