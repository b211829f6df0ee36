"""Take a trained model away: GGUF files for llama.cpp and Ollama, a model card, a push to a model hub."""
