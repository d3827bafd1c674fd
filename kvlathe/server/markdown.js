"use strict";
// Markdown as elements and text nodes. Nothing that a model writes becomes markup.
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/, ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/, HEAD = /^ {0,3}(#{1,6})\s+(.*?)#*\s*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(\S.*?)\*\*|__(\S.*?)__|\*(\S[^*]*?)\*|\[([^\][]+)\]\(([^()\s]+)\)/;
const MOST_INLINE = 5000, DEEPEST = 6;

function made(name, content, kind) {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  if (content !== undefined) element.append(content);
  return element;
}
function inline(text, parent, depth = 0) {
  let found = null;
  while (text.length <= MOST_INLINE && depth < DEEPEST && (found = INLINE.exec(text))) {
    const [whole, , code, bold, strong, italic, label, target] = found;
    if (found.index) parent.append(text.slice(0, found.index));
    if (code !== undefined) parent.append(made("code", code.trim() || code));
    else if (label !== undefined) parent.append(link(label, target));
    else parent.append(inline(bold ?? strong ?? italic, made(italic === undefined ? "strong" : "em"), depth + 1));
    text = text.slice(found.index + whole.length);
  }
  if (text) parent.append(text);
  return parent;
}
function link(label, target) {
  if (!/^https?:[/][/]/.test(target)) return `[${label}](${target})`;
  const element = made("a", label);
  element.href = target;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
  element.title = target;
  return element;
}
function codeBlock(language, text) {
  const block = made("div", undefined, "code"), bar = made("div", made("span", language || "text"), "bar");
  const copy = made("button", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text); copy.textContent = "Copied"; }
    catch (error) { copy.textContent = "Not allowed"; }
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  bar.append(copy);
  block.append(bar, made("pre", made("code", text)));
  return block;
}
function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}
function table(lines) {
  const element = document.createElement("table");
  lines.forEach((line, i) => {
    if (i === 1) return;
    const row = document.createElement("tr");
    for (const cell of cells(line)) row.append(inline(cell, document.createElement(i ? "td" : "th")));
    element.append(row);
  });
  return made("div", element, "wide");
}
function begins(line, next) {
  return FENCE.test(line) || HEAD.test(line) || RULE.test(line) || ITEM.test(line) || /^ {0,3}>/.test(line)
    || (line.includes("|") && next !== undefined && next.includes("|") && DIVIDER.test(next));
}
function list(lines, start, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]), ordered = /\d/.test(mark);
  const element = document.createElement(ordered ? "ol" : "ul");
  if (ordered) element.start = parseInt(mark, 10);
  let at = start;
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length < indent.length || /\d/.test(item[2]) !== ordered) break;
    const own = [item[3]];
    for (at++; at < lines.length; at++) {
      const line = lines[at], deeper = line.startsWith(" ".repeat(indent.length + 2));
      if (!line.trim()) { if (!(lines[at + 1] || "").startsWith(" ".repeat(indent.length + 2))) break; own.push(""); continue; }
      if (!deeper && (ITEM.test(line) || begins(line))) break;
      own.push(deeper ? line.slice(indent.length + 2) : line.trim());
    }
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] || "")) at++;
    const content = document.createElement("li");
    if (own.length === 1) inline(own[0], content);
    else content.append(markdown(own.join("\n"), depth + 1));
    element.append(content);
  }
  return [element, at];
}
function markdown(text, depth = 0) {
  const whole = document.createDocumentFragment(), lines = text.split("\n");
  if (depth > DEEPEST) { whole.append(text); return whole; }
  for (let at = 0; at < lines.length;) {
    const line = lines[at], fence = FENCE.exec(line), head = HEAD.exec(line);
    if (!line.trim()) { at++; continue; }
    if (fence) {
      const own = [];
      for (at++; at < lines.length && !lines[at].trim().startsWith(fence[1]); at++) own.push(lines[at]);
      at++;
      whole.append(codeBlock(fence[2], own.join("\n")));
    } else if (head) {
      whole.append(inline(head[2], document.createElement(head[1].length < 3 ? "h3" : "h4")));
      at++;
    } else if (RULE.test(line)) {
      whole.append(document.createElement("hr"));
      at++;
    } else if (/^ {0,3}>/.test(line)) {
      const own = [];
      for (; at < lines.length && /^ {0,3}>/.test(lines[at]); at++) own.push(lines[at].replace(/^ {0,3}> ?/, ""));
      whole.append(made("blockquote", markdown(own.join("\n"), depth + 1)));
    } else if (ITEM.test(line)) {
      const [element, end] = list(lines, at, depth);
      whole.append(element);
      at = end;
    } else if (begins(line, lines[at + 1])) {
      const start = at;
      for (; at < lines.length && lines[at].includes("|"); at++);
      whole.append(table(lines.slice(start, at)));
    } else {
      const start = at;
      for (at++; at < lines.length && lines[at].trim() && !begins(lines[at], lines[at + 1]); at++);
      whole.append(inline(lines.slice(start, at).join("\n"), document.createElement("p")));
    }
  }
  return whole;
}
