"""An engine folder behind HTTP, as the OpenAI API: schema (what is said), answers (how it is computed), app, run."""
