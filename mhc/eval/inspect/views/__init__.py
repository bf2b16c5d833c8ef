"""Define the views of eval.inspect: what each prints, stores and draws."""
