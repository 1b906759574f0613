const zlib = require('zlib');
function nested(depth) { return depth ? { depth, inner: nested(depth - 1) } : [1.5, 'x', null]; }
for (;;) {
  const text = JSON.stringify(Array.from({ length: 50 }, () => nested(30)));
  zlib.inflateSync(zlib.deflateSync(Buffer.from(text)));
  text.match(/\w+/g).sort();
}
