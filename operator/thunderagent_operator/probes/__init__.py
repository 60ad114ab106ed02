"""How much a worker can hold, asked of the worker itself: one pure module per engine, and one HTTP prober."""
