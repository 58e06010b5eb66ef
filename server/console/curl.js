// A request as a command for a POSIX shell.

export function curlCommand(url, key, body) {
  return [
    `curl --no-buffer ${quoted(url)}`,
    ...(key ? [`  -H ${quoted(`authorization: Bearer ${key}`)}`] : []),
    "  -H 'content-type: application/json'",
    `  -d ${quoted(JSON.stringify(body, null, 2))}`,
  ].join(" \\\n");
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
