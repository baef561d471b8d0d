# An image that serves a run:
#   docker build -t hetxl .
#   docker run -p 8000:8000 -v "$PWD/runs/mine:/run/model:ro" hetxl
FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir '/src[train,serve]' && rm -rf /src && useradd --create-home serve
USER serve
EXPOSE 8000
HEALTHCHECK CMD python -c "import urllib.request; urllib.request.urlopen('http://localhost:8000/health', timeout=3)"
ENTRYPOINT ["hetxl", "serve", "/run/model", "--host", "0.0.0.0"]
