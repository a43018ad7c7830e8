"""The API that MLflow clients use, under `/api/2.0/mlflow`."""
