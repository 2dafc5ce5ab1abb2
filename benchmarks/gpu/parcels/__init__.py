"""What a lent machine without a network lacks, in parts that are small enough to travel."""
