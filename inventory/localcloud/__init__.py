"""A small cloud on one Linux box: real hosts (systemd-nspawn), real disks (loop images), a real network."""
