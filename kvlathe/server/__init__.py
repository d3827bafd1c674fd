"""An engine folder behind HTTP, as the OpenAI API: schema and replies (what is said), choices and
answers (how it is written and computed), app, run."""
