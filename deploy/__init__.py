"""The desired state of a node, as pyinfra deploys."""
