"""What a job leaves behind, and how to read it: `ddplab.why` is the way in."""
