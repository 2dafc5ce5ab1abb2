"""What stands in a loaded model where a layer of transformers stood."""
