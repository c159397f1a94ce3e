"""What attention's forward pass leaves for its backward pass, by name, for `jax.checkpoint` policies."""

# Outputs and log-sum-exps: kept, a rematerialised layer attends once less.
ATTENTION = 'attention_output'
# Numbers of a query (and head) that take a pass over all of its keys: log-sum-exps of dense attention and of
# index scores. Small, so there is no reason not to keep them.
STATISTICS = 'attention_statistics'
