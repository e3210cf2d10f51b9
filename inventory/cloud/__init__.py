"""What renting and snapshots ask of a cloud: the port, its values and its errors. No vendor's name is in here."""
