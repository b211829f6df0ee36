# docker build --build-arg DEVICE=cpu -t firstcall .        (DEVICE: gpu or cpu)
# docker run --gpus all --shm-size 8g -v "$PWD/runs:/firstcall/runs" firstcall run --profile gpu
FROM python:3.12-slim-bookworm

ARG DEVICE=gpu

# Triton compiles its launchers at run time, with Python's headers from the base image; vLLM on a CPU loads libnuma.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev libnuma1 git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /firstcall
COPY . .
RUN python run_pipeline.py setup --profile "${DEVICE}"

VOLUME /firstcall/runs
ENTRYPOINT ["python", "run_pipeline.py"]
CMD ["--help"]
