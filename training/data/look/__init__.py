"""What data hold and what will be learned of them, before anything is rented or started: `fab data`, and the data part
of a run's report. Made in the very pass that prepares the data, so that it says what training learns."""
