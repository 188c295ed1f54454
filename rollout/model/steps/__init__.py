"""Steps of the engine as a hosted module's attention sees them, and pools for trials of its code."""
