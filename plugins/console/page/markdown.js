
// A little Markdown: paragraphs, lists as they stand, code, bold. Only text nodes are made of what the model writes.

function inline(text) {
  const found = [];
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (/^`.+`$/.test(part)) found.push(el("code", null, part.slice(1, -1)));
    else if (/^\*\*.+\*\*$/.test(part)) found.push(el("strong", null, part.slice(2, -2)));
    else if (part) found.push(part);
  }
  return found;
}

function markdown(text) {
  const found = [];
  text.split(/^```.*$/m).forEach((part, index) => {
    if (index % 2) {
      found.push(el("pre", null, el("code", null, part.replace(/^\n/, "").replace(/\n$/, ""))));
      return;
    }
    for (const paragraph of part.split(/\n{2,}/)) {
      if (paragraph.trim()) found.push(el("p", { class: "plain" }, inline(paragraph.replace(/^\n+|\n+$/g, ""))));
    }
  });
  return found;
}
