"""One Prefect task per stage: resolve references, call an engine, store the result, return a reference."""
