// A Go program without cgo: no C library, no malloc. It waits for the end of its input.
package main

import (
	"io"
	"os"
)

func main() {
	os.Stdout.WriteString("ready\n")
	io.Copy(io.Discard, os.Stdin)
}
