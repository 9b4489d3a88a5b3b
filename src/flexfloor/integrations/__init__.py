"""What joins FlexFloor to the trainers and clusters of others; every part needs an extra of its own."""
