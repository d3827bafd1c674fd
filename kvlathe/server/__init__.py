"""An engine folder behind HTTP, as the OpenAI API: schema (what is said), choices and answers (how it is written and
computed), app, run."""
