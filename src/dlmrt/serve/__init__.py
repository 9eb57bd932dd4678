"""An OpenAI-compatible server for one request at a time, and the page that shows the canvas."""
