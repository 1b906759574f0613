// Allocates, checks and frees buffers outside V8's heap until its standard input ends. Needs --expose-gc.

const blocks = new Map();
let rounds = 0;
let x = 88172645463325252n;

function below(limit) {
  x ^= (x << 13n) & 0xffffffffffffffffn;
  x ^= x >> 7n;
  x ^= (x << 17n) & 0xffffffffffffffffn;
  return Number(x % BigInt(limit));
}

const timer = setInterval(() => {
  for (let i = 0; i < 200; i++) {
    const key = below(1500);
    const block = blocks.get(key);
    if (block === undefined) {
      const data = Buffer.alloc([9000, 20000, 60000][below(3)], key & 255);
      blocks.set(key, data);
    } else {
      blocks.delete(key);
      for (const at of [0, block.length >> 1, block.length - 1]) {
        if (block[at] !== (key & 255)) {
          console.error("WRONG: a buffer was changed");
          process.abort();
        }
      }
    }
  }
  rounds++;
  if (rounds % 50 === 0) global.gc();
}, 2);

process.stdin.resume();
process.stdin.on("end", () => {
  clearInterval(timer);
  console.log(JSON.stringify({ rounds }));
});
console.log("ready");
