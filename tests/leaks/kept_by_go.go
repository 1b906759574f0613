// A Go program that keeps pointers to C blocks in Go memory, and replaces them all the time from several goroutines.
package main

/*
#include <stdlib.h>
#include <string.h>

static void *filled(size_t n) { return memset(malloc(n), 'x', n); }
*/
import "C"

import (
	"fmt"
	"math/rand"
	"time"
	"unsafe"
)

type entry struct {
	block unsafe.Pointer
	next  *entry
}

func shelf(number int64) {
	random := rand.New(rand.NewSource(number))
	var list *entry
	kept := make([]unsafe.Pointer, 8000)
	byName := map[string]unsafe.Pointer{}
	for i := range kept {
		kept[i] = C.filled(C.size_t(24 + i%700))
		if i%4 == 0 {
			list = &entry{C.filled(C.size_t(40 + i%90)), list}
		}
		byName[fmt.Sprint(i%1000, " ", number)] = kept[i]
	}
	for {
		for range 50 {
			i := random.Intn(len(kept))
			C.free(kept[i])
			kept[i] = C.filled(C.size_t(24 + random.Intn(700)))
			C.free(list.block)
			list = &entry{C.filled(64), list.next}
		}
		time.Sleep(time.Millisecond)
	}
}

func main() {
	for number := range int64(3) {
		go shelf(number)
	}
	select {}
}
