"""forecasting: ``lohan-fx plan``: what a training will be like, of models that were never materialised."""
