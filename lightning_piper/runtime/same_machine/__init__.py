"""Messages between processes of one machine: pipes and memory that both processes can read."""
