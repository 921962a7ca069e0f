"""Teachers: processes that give the logprobs of another model to the tokens of a run."""
