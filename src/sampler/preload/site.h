/* How densely each call site is sampled: stratified sampling with Neyman's allocation.
 *
 * One distance for a whole process drowns what lives in what does not: a place that allocates 2.9 GiB/s and frees at once gets all samples
 * that the limit allows, and a leak of 0.8 MB/s one in ten seconds. So sample points are first drawn at a distance that is SITE_FINER
 * doublings shorter than the usual one, as candidates. A candidate costs no stack and no probe: its call site is looked up here, and it is
 * kept with probability 1/2^n, n for each site. A kept one is a sample point at 2^n times the candidates' distance, and is reported as such.
 *
 * The variance of a site's live bytes L, sampled at distance T, is T * L; its samples a second, of R bytes allocated a second, are R / T.
 * The sum of the variances is least, for a given number of samples, if T is proportional to sqrt(R / L): to the inverse square root of the
 * mean lifetime of its blocks. The factor is adjusted so that a process has as many samples as with one distance for all; sites whose
 * blocks die young give theirs to sites whose blocks live. Above 1/64 of the sampled heap a site's L does not count for more: a leak that
 * begins beside a large cache is to be seen.
 *
 * L is the mean over some seconds of the weights of live samples, and of what was allocated the part that a quarter of a sample more is: a
 * site that was not seen before may be one of which everything lives. n depends on what was sampled before, never on the candidate, so each
 * weight has its block's size as its mean.
 *
 * A site is the caller's address, the low bits of its stack pointer, which tell apart most paths through a common function such as
 * xmalloc, and the logarithm of the size. It is a hash: sites that share a slot share their distance, which biases nothing. The fields are
 * accessed without a lock, and an update that is lost to another thread's makes a distance less fitting, not wrong. */
#ifndef FRAGPROF_SITE_H
#define FRAGPROF_SITE_H

#include "platform.h"

/* Doublings between the candidates' distance and the usual one: 16 KiB and 512 KiB. */
#define SITE_FINER 5u
/* Doublings by which a site's distance is longer than the usual one at most: what lives at a site of which that was not known has at most
 * sqrt(2^3) times the error that it has with one distance for all. */
#define SITE_COARSER 3u
/* 128 KiB, of which a page exists for each 128 sites in use. */
#define SITE_BITS 12u
#define SITES (1u << SITE_BITS)

/* The slot of a call. */
uint32_t site_of(const void *caller, size_t size_bytes);
/* A candidate was found: doublings of the finest distance with which the site is to be sampled. `found_bytes`: its weight as a candidate.
 * `limit`: doublings that the limit on samples requires, with which it was drawn: what is returned is at least as much. */
uint32_t site_doublings(uint32_t site, uint64_t found_bytes, uint32_t limit, uint64_t usual_bytes, uint64_t now_ns);
/* A candidate was kept. */
void site_kept(uint32_t site);
/* A sampled block lives from now on, or no longer. */
void site_live(uint32_t site, uint64_t weight_bytes, uint64_t now_ns);
void site_dead(uint32_t site, uint64_t weight_bytes, uint64_t now_ns);

#endif
