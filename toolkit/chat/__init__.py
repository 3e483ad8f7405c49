"""For API plugins that chat: templates, rendering, tools and turns."""
