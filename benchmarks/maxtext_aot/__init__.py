"""MaxText's training step beside ours, both compiled for TPUs that are not here."""
