"""The only reasons for which CI may skip a test: what no machine of CI can be given. Any other skip fails there."""

GPU = "needs an NVIDIA GPU"
RESIZE = "needs CAP_SYS_RESOURCE, which some virtual machines withhold even from root"
RECORDINGS = "needs recorded answers of the real API ($SPOTUNE_ECS_SAMPLES names their folder)"
ON_CI = {GPU, RESIZE, RECORDINGS}
