# An image that serves a run:
#   docker build -t hetxl .
#   docker build -t hetxl --build-arg EXTRAS=serve,timm,hf .     # for backbones of timm and transformers
#   docker run -p 8000:8000 -v "$PWD/runs/mine:/run/model:ro" hetxl
FROM python:3.12-slim
ARG EXTRAS=serve
COPY . /src
RUN pip install --no-cache-dir "/src[$EXTRAS]" && rm -rf /src && useradd --create-home serve
USER serve
EXPOSE 8000
HEALTHCHECK CMD python -c "import urllib.request; urllib.request.urlopen('http://localhost:8000/health', timeout=3)"
ENTRYPOINT ["hetxl", "serve", "/run/model", "--host", "0.0.0.0"]
